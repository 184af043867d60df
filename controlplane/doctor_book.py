"""The doctor's book (DESIGN §9): every symptom that `trimtab doctor` looks for, in the order in which it tells of them. Pure."""

from __future__ import annotations

from controlplane import doctor_latency, doctor_memory, doctor_mesh, doctor_throughput
from controlplane.doctor import Symptom

BOOK = (
    Symptom("p99", "P99 jumped", doctor_latency.p99),
    Symptom("throughput", "throughput fell by 30 % or more", doctor_throughput.throughput),
    Symptom("memory", "memory grows", doctor_memory.memory),
    Symptom("delay", "requests wait too long for their first step", doctor_latency.delay),
    Symptom("oom", "an engine runs out of memory", doctor_memory.oom),
    *doctor_mesh.BOOK,
)
