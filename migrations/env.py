"""Alembic's entry: configures one run over the connection that fairq hands in.

`fairq migrate` comes here. Your own Alembic tree does not: there your env.py is the one that runs, and only
versions/ is shared.
"""

from alembic import context


def main() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:
        raise SystemExit("These revisions are run by `fairq migrate`; for plain SQL there is `fairq sql`.")
    context.configure(
        connection=connection,
        target_metadata=None,
        version_table="schema_version",
        version_table_schema="fairq",
        transactional_ddl=True,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


main()
