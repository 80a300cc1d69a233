"""``--hypothesis-profile long``: the model searches for an hour or two, differently each time."""

from hypothesis import settings

settings.register_profile("long", deadline=None)
