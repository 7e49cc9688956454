"""`veca serve`: features of images over HTTP, in batches gathered from all requests.

`app` is the API, `state` what it computes with, `schemas` its types. `batching` gathers images of one setting and runs
them in one thread, `formats` takes bodies apart and writes features, `metrics` counts. Connections, uploads, errors and
security are the explorer's.
"""
