"""A multi-tenant fair queue that lives in PostgreSQL."""

__all__: list[str] = []
