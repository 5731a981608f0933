"""${message}"""

from fairq import install

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    install.run_revision(__file__, "up")


def downgrade() -> None:
    install.run_revision(__file__, "down")
