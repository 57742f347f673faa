"""Commands of the local cluster: `slipstream up`, `down`, `kill`, `drain`, `restart`, `status`, `route`.

`slipstream.cli` finds them by entry points; nothing else imports them. Must not import `bench`, `models` or
`tests`.
"""
