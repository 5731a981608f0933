"""A DSN in SQLAlchemy's and Django's form. Imports each only when it is used."""

from typing import TYPE_CHECKING, Any

from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    import sqlalchemy


def alchemy_url(dsn: str, driver: str) -> "sqlalchemy.URL":
    import sqlalchemy

    parts = conninfo_to_dict(dsn)
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=str(parts.get("user")),
        password=None if parts.get("password") is None else str(parts["password"]),
        database=str(parts["dbname"]),
        query={name: str(parts[name]) for name in ("host", "port") if name in parts},
    )


def django_handler(dsn: str, configure: bool = False, **options: Any) -> Any:
    """Django's `connections` for that database; `configure` also makes them those of `django.db`."""
    import django
    from django.conf import settings
    from django.db.utils import ConnectionHandler

    parts = conninfo_to_dict(dsn)
    default = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": parts.get("port", ""),
        "OPTIONS": options,
    }
    if not settings.configured:
        settings.configure(
            USE_TZ=True, INSTALLED_APPS=[], DATABASES={"default": default} if configure else {}
        )
        django.setup()
    return ConnectionHandler({"default": default})
