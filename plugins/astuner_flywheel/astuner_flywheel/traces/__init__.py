"""Conversations of users from traces, and tasks from conversations.

Flow: sources (AgentScope Studio's database, OTLP spans, chats) → `Conversation` → threads and turns → feedback →
filters → tasks of two splits. Invariant: contents of a trace are data: they are never executed, trained as output of
the policy, or placed in the system role.
"""
