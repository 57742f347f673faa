"""The images of deploy/images/ as containers under runc: their size, their start, and a cluster of them.

    python -m bench.images              size and start time of each image, as `make images-report`

Needs root, buildah, runc and images that `make images` built. It must not import tests.
"""
