"""What users did, as conversations, and conversations as tasks.

One direction: sources (AgentScope Studio's database, OTLP spans, chats) → `Conversation` → threads and turns → feedback
→ filters → tasks on two sides.  Invariant: what a trace holds is data; nothing in it is run, trained as if the policy
had said it, or put into a system role.
"""
