"""The SGLang side: pulls orders, generates, has the answers judged, and puts rollouts. Owns one engine."""
