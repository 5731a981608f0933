from django.db import models


class Order(models.Model):
    name = models.TextField()
