"""The bench `sizing`: memory and CPU of each process of a mesh, by what it has to do."""
