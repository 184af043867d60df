"""Workers started anew one after another: a pure machine (`steps` over `state`), and the shell that drives it."""
