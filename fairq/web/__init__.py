"""A page that shows who gets what, as an ASGI app: `fairq web` serves it, an application may mount it.

app.mount("/fairq", fairq.web.asgi(dsn, allow=is_operator))
"""

from fairq.web.app import asgi
from fairq.web.signing import link

__all__ = ["asgi", "link"]
