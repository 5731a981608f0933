"""A web page that shows who gets what, as an ASGI app: `fairq web` serves it, an application may mount it.

app.mount("/fairq", fairq.web.asgi(dsn, allow=is_operator))
"""

from fairq.web.app import asgi
from fairq.web.signing import link
from fairq.web.standing import Standing, standing

__all__ = ["Standing", "asgi", "link", "standing"]
