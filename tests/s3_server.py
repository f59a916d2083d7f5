"""The S3 server that tests use: the one of `make stack`."""

from k8s.stack.seaweedfs import S3Server, weed_path

__all__ = ["S3Server", "weed_path"]
