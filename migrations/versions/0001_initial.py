"""initial"""

from fairq import install

revision = "fairq_0001"
down_revision = None
branch_labels = ("fairq",)
depends_on = None


def upgrade() -> None:
    install.run_revision(__file__, "up")


def downgrade() -> None:
    install.run_revision(__file__, "down")
