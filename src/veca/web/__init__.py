"""The explorer: a local page that shows what a model does with an image, and the HTTP API under it.

`app` is the API and its state, `schemas` its types. It answers with a job queue (`jobs`), the images (`images`), and
what the model computes and costs (`analysis`). `security` checks every request, `connections` is the server with limits
on connections. `static/` is the page: plain ES modules without a build step.
"""
