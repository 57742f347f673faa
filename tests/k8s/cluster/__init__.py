"""The end-to-end suite on a real Kubernetes: `make test-k8s` with KUBECONFIG, and the images on its nodes."""
