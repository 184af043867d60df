"""A policy tried on canaries before it holds for all: what is known of a rollout, how it is judged, and who carries it on."""
