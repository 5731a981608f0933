from typing import Any


class FairqElsewhere:
    def db_for_write(self, model: Any, **_: Any) -> str | None:
        return "other" if model._meta.app_label == "fairq" else None
