"""The controllers: one pure file each, `step(state, seen, policy, now) → Decision` (DESIGN §6); `roster` names them all."""
