/** Keyboard shortcuts. Each page and component handles its own keys. */

export interface Shortcut {
  keys: string
  does: string
}

export const HELP: { where: string; shortcuts: Shortcut[] }[] = [
  {
    where: 'Everywhere',
    shortcuts: [
      { keys: 'j / k', does: 'next / previous: run, row, episode' },
      { keys: 'Enter', does: 'open' },
      { keys: 'Esc or u', does: 'up' },
      { keys: '/', does: 'search' },
      { keys: 't', does: 'theme: system, light, dark' },
      { keys: '?', does: 'this help' },
    ],
  },
  {
    where: 'Run',
    shortcuts: [
      { keys: 'e', does: 'show episodes' },
      { keys: 'drag', does: 'on a curve: zoom; double click: reset' },
    ],
  },
  {
    where: 'Episodes',
    shortcuts: [{ keys: 'g / G', does: 'first / last' }],
  },
  {
    where: 'Episode',
    shortcuts: [
      { keys: '1 2 3 4', does: 'messages, tokens, tree, lanes' },
      { keys: 'n / p', does: 'next / previous turn' },
      { keys: '[ / ]', does: 'previous / next attempt of the group' },
      { keys: 'g / b', does: 'label as good / bad; again: remove the label' },
      { keys: '← →', does: 'tokens: previous / next token' },
      { keys: 'w', does: 'tokens: show white space' },
    ],
  },
]

/** The key of an event for the page: not typed into a field, and not a browser or system shortcut. */
export function keyOf(event: KeyboardEvent): string | null {
  // an open dialog or menu handles all keys
  if (document.querySelector('dialog[open], :popover-open')) return null
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return null
  const target = event.target
  if (target instanceof HTMLElement && target.matches('input, textarea, select')) {
    return event.key === 'Escape' ? 'Escape' : null
  }
  // a focused link or button handles Enter itself
  if (event.key === 'Enter' && target instanceof HTMLElement && target.matches('a, button, summary')) return null
  return event.key
}
