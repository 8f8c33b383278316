/** Which keys do what. One listener for the page; whoever is on it says what a key does there. */

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
      { keys: 't', does: 'theme: as the system, light, dark' },
      { keys: '?', does: 'this help' },
    ],
  },
  {
    where: 'Run',
    shortcuts: [
      { keys: 'e', does: 'its episodes' },
      { keys: 'drag', does: 'on a curve: zoom; double click: all again' },
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
      { keys: 'g / b', does: 'label it good / bad; again: take it back' },
      { keys: '← →', does: 'tokens: previous / next token' },
      { keys: 'w', does: 'tokens: show white space' },
    ],
  },
]

/** The key of an event that is meant for the page: not typed into a field, and no browser's or system's shortcut. */
export function keyOf(event: KeyboardEvent): string | null {
  // a dialog or a menu has the keyboard to itself
  if (document.querySelector('dialog[open], :popover-open')) return null
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return null
  const target = event.target
  if (target instanceof HTMLElement && target.matches('input, textarea, select')) {
    return event.key === 'Escape' ? 'Escape' : null
  }
  // a link or button that has the focus opens itself
  if (event.key === 'Enter' && target instanceof HTMLElement && target.matches('a, button, summary')) return null
  return event.key
}
