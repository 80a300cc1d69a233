"""The batch server: files of requests in, files of results out, by way of the routers' HTTP API."""
