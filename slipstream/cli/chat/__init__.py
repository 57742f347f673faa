"""`slipstream chat`: a conversation in the terminal."""
