"""The native disk code: its system calls, its errors, and large segments."""
