"""The explorer: a local page that shows what a model does with a picture, and the HTTP API under it.

`uploads` receives pictures, `pictures` holds them, `analysis` looks at them, `costs` counts and measures, `work` does
all this off the request thread, `explorer` puts them together; `app` is the API, `answers` its words, `guard` decides
who may ask, `connections` is the server and the limits of its connections, `cli` is the command; `static/` is the page,
plain ES modules without a build. `python -m veca.bench.explorer` measures it.
"""
