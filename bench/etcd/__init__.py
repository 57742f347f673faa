"""How much the etcd of a local cluster stores."""
