"""The explorer: a local page that shows what a model does with an image, and the HTTP API under it.

`app` is the API and `schemas` its types; `explorer` answers requests with a job queue (`jobs`), the images (`uploads`,
`images`), what the model computes (`analysis`) and its costs (`costs`). `security` checks every request, `connections`
is the server with limits on connections. `static/` is the page: plain ES modules without a build step.
"""
