"""The explorer: a local page that shows what a model does with a picture, and the HTTP API under it.

`pictures` holds what was uploaded, `analysis` looks at it, `costs` counts and measures, `work` does all this off the
request thread, `guard` decides who may ask, `app` is the API, `cli` the command; `static/` is the page.
"""
