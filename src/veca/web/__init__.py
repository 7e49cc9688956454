"""The explorer: a local page that shows what a model does with an image, and the HTTP API under it.

`app` is the API, `schemas` its types, `state` what it answers from: a job queue (`jobs`), the images (`images`), a
folder to find neighbours in (`folder`), an index to search (`searched`), and what the model computes and costs
(`analysis`). `security` checks every request, `connections` is the server with limits on connections. `static/` is the
page: plain ES modules without a build step.
"""
