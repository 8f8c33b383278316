"""What a perfect agent writes for each family of the synthetic root; found out through the apps, as an agent would."""

from __future__ import annotations

_NOTES = """
passwords = {p["account_name"]: p["password"] for p in apis.supervisor.show_account_passwords()}
me = apis.supervisor.show_profile()
token = apis.simple_note.login(username=me["email"], password=passwords["simple_note"])["access_token"]
notes, page = [], 0
while True:
    found = apis.simple_note.search_notes(access_token=token, page_index=page)
    if not found:
        break
    notes += found
    page += 1
instruction = apis.supervisor.show_active_task()["instruction"]
"""

SOLUTIONS = {
    "a0count": _NOTES + "apis.supervisor.complete_task(answer=len(notes))",
    "b0phone": """
passwords = {p["account_name"]: p["password"] for p in apis.supervisor.show_account_passwords()}
me = apis.supervisor.show_profile()
token = apis.phone.login(username=me["phone_number"], password=passwords["phone"])["access_token"]
name = apis.supervisor.show_active_task()["instruction"].split(" of ")[1].split(" in ")[0]
contacts = apis.phone.search_contacts(access_token=token, query=name)
apis.supervisor.complete_task(answer=contacts[0]["phone_number"])
""",
    "c0write": _NOTES
    + """
apis.simple_note.create_note(access_token=token, title=instruction.split("'")[1], content="milk")
apis.supervisor.complete_task()
""",
    "d0erase": _NOTES
    + """
gone = [note for note in notes if note["title"] == instruction.split("'")[1]]
apis.simple_note.delete_note(access_token=token, note_id=gone[0]["note_id"])
apis.supervisor.complete_task()
""",
}
"""Family -> code."""

LOG_IN = _NOTES
