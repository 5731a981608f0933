"""fairq's revision of the same number."""

from django.db import migrations

from fairq.contrib.django.operations import Revision


class Migration(migrations.Migration):
    initial = True
    operations = [Revision("fairq_0001")]
