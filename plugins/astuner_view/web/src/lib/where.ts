/**
 * Conditions on episodes, as in `astuner export --where`: parsed for the chips, and evaluated for exported pages.
 * Invariant: conditions select the same episodes as on the server.
 */
import type { Listed } from './api'

export interface Condition {
  name: string
  operator: '=' | '!=' | '<' | '<=' | '>' | '>=' | '~'
  value: string
}

const NUMBERS = ['step', 'attempt', 'reward', 'seconds', 'retries', 'turns', 'tokens', 'prompt_tokens', 'branches']
const WORDS = ['episode', 'group', 'task', 'split', 'stop_reason', 'error', 'query', 'cause', 'label', 'why']
const LISTS = ['agent', 'tool']
export const NAMES = [...NUMBERS, ...WORDS, ...LISTS, 'success', 'text']

/** An episode with its searchable text (`searchable`). */
export type Searchable = Listed & { text: string }

/** @throws Error with a message for the user. */
export function read(text: string): Condition {
  const found = /^\s*(\w+)\s*(!=|>=|<=|=|>|<|~)([\s\S]*)$/.exec(text)
  if (!found) throw new Error('write a name, an operator (= != < <= > >= ~) and a value, e.g. reward>=0.5')
  const condition = { name: found[1], operator: found[2], value: found[3]?.trim() } as Condition
  const { name, operator, value } = condition
  if (NUMBERS.includes(name)) {
    const none = value.toLowerCase() === 'none' && (operator === '=' || operator === '!=')
    if (operator === '~') throw new Error(`${name} is a number; compare it with = != < <= > >=`)
    if (!none && (value === '' || Number.isNaN(Number(value)))) throw new Error(`${value || 'an empty value'} is not a number`)
  } else if (WORDS.includes(name)) {
    if (!['=', '!=', '~'].includes(operator)) {
      throw new Error(`${name} is text; compare it with = or !=, or search it with ~`)
    }
  } else if (LISTS.includes(name)) {
    if (!['=', '!='].includes(operator)) throw new Error(`${name} is a list of names; compare it with = or !=`)
  } else if (name === 'success') {
    if (operator !== '=' || !['true', 'false', 'none'].includes(value.toLowerCase())) {
      throw new Error('success must be =true, =false or =none (not scored)')
    }
  } else if (name === 'text') {
    if (operator !== '~' || wordsOf(value).length === 0) {
      throw new Error('text is searched for words, e.g. text~apple pie')
    }
  } else {
    throw new Error(`${name} is not a known name; use one of ${NAMES.join(', ')}`)
  }
  return condition
}

/** Whether an episode meets all conditions; a missing value meets only `!=`. */
export function meets(episode: Searchable, conditions: Condition[]): boolean {
  return conditions.every((condition) => meetsOne(episode, condition))
}

function meetsOne(episode: Searchable, { name, operator, value }: Condition): boolean {
  if (NUMBERS.includes(name)) {
    const have = episode[name as 'step' | 'reward']
    if (value.toLowerCase() === 'none') return (have === null) === (operator === '=')
    return compared(have, operator, Number(value))
  }
  if (WORDS.includes(name)) {
    const column = { episode: 'episode_id', group: 'group_id', task: 'task_id' }[name] ?? name
    const have = episode[column as 'episode_id' | 'split']
    if (name === 'label' && value.toLowerCase() === 'none') return (have === '') === (operator === '=')
    if (operator === '~') return have.toLowerCase().includes(value.toLowerCase())
    return (have === value) === (operator === '=')
  }
  if (name === 'agent') return episode.agents.includes(value) === (operator === '=')
  if (name === 'tool') return episode.tools.includes(value) === (operator === '=')
  if (name === 'success') {
    return episode.success === { true: true, false: false, none: null }[value.toLowerCase()]
  }
  return wordsOf(value).every((word) => episode.text.includes(` ${word}`))
}

function compared(have: number | null, operator: Condition['operator'], than: number): boolean {
  if (operator === '!=') return have !== than
  if (have === null) return false
  if (operator === '=') return have === than
  if (operator === '<') return have < than
  if (operator === '<=') return have <= than
  if (operator === '>') return have > than
  return have >= than
}

/** The words of a search in lower case; words without letters and digits are ignored. */
export function wordsOf(text: string): string[] {
  return text.split(/\s+/).map(plain).filter((word) => word !== '')
}

/** The text of `Searchable.text`: each word preceded by a space, so that word beginnings match. */
export function searchable(text: string): string {
  return ` ${plain(text)}`
}

function plain(text: string): string {
  return (text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []).join(' ')
}

/** The text of a chip: `stop reason = truncated`. An invalid condition is shown unchanged. */
export function described(text: string): string {
  const found = /^\s*(\w+)\s*(!=|>=|<=|=|>|<|~)([\s\S]*)$/.exec(text)
  if (!found) return text
  const [, name = '', operator = '', value = ''] = found
  const sign = { '!=': '≠', '>=': '≥', '<=': '≤', '~': '∋' }[operator] ?? operator
  return `${name.replaceAll('_', ' ')} ${sign} ${value.trim()}`
}

/** `where` with the conditions on `name` (with one of `operators`) replaced by `value`; null removes them. */
export function withCondition(where: string[], name: string, operator: string, value: string | null): string[] {
  const start = new RegExp(`^\\s*${name}\\s*${operator.replace(/[<>=!~]/g, '\\$&')}(?!=)`)
  const others = where.filter((condition) => !start.test(condition))
  return value === null || value === '' ? others : [...others, `${name}${operator}${value}`]
}

/** The value of the condition on `name` with `operator`, or an empty text. */
export function valueOf(where: string[], name: string, operator: string): string {
  const start = new RegExp(`^\\s*${name}\\s*${operator.replace(/[<>=!~]/g, '\\$&')}(?!=)([\\s\\S]*)$`)
  for (const condition of where) {
    const found = start.exec(condition)
    if (found) return (found[1] ?? '').trim()
  }
  return ''
}
