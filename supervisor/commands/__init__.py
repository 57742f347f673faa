"""Commands of the local cluster (`slipstream up`, `drain`, `status`), and `config`, `plan` and `route`.

`slipstream.cli` finds them by entry points; nothing else imports them. Must not import `bench`, `models` or
`tests`.
"""
