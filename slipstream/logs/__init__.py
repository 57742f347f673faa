"""Lines of logs, which services and tools of the SDK share. Must not import other packages of slipstream."""
