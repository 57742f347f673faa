"""The end-to-end suite on a real Kubernetes: `make test-k8s` with KUBECONFIG. It needs the images on the nodes."""
