/**
 * Conditions on episodes, as `astuner export --where` has them: taken apart for the chips, and met here for the
 * exported page, which has no server. Invariant: same conditions, same episodes as the server's.
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

/** An episode of which more is known than a list shows: `text` is all that can be searched, as `searchable` has it. */
export type Searchable = Listed & { text: string }

/** @throws Error a sentence that says what is wrong with it. */
export function read(text: string): Condition {
  const found = /^\s*(\w+)\s*(!=|>=|<=|=|>|<|~)([\s\S]*)$/.exec(text)
  if (!found) throw new Error('write a name, one of = != < <= > >= ~, and a value, e.g. reward>=0.5')
  const condition = { name: found[1], operator: found[2], value: found[3]?.trim() } as Condition
  const { name, operator, value } = condition
  if (NUMBERS.includes(name)) {
    const none = value.toLowerCase() === 'none' && (operator === '=' || operator === '!=')
    if (operator === '~') throw new Error(`${name} is a number; compare it with = != < <= > >=`)
    if (!none && (value === '' || Number.isNaN(Number(value)))) throw new Error(`${value || 'nothing'} is no number`)
  } else if (WORDS.includes(name)) {
    if (!['=', '!=', '~'].includes(operator)) {
      throw new Error(`${name} is text; compare it with = or !=, or look into it with ~`)
    }
  } else if (LISTS.includes(name)) {
    if (!['=', '!='].includes(operator)) throw new Error(`${name} are names; ask for one with = or !=`)
  } else if (name === 'success') {
    if (operator !== '=' || !['true', 'false', 'none'].includes(value.toLowerCase())) {
      throw new Error('success is =true, =false, or =none where there is no verdict')
    }
  } else if (name === 'text') {
    if (operator !== '~' || wordsOf(value).length === 0) {
      throw new Error('text is searched for words, e.g. text~apple pie')
    }
  } else {
    throw new Error(`there is no ${name}; there are ${NAMES.join(', ')}`)
  }
  return condition
}

/** Whether an episode meets all of them; one without a value meets none on it but `!=`. */
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

/** What a search is made of: words, lower case; what holds no letter and no digit is none. */
export function wordsOf(text: string): string[] {
  return text.split(/\s+/).map(plain).filter((word) => word !== '')
}

/** A text as `Searchable.text` has it: its words with a space before each, so that a word's beginning is found. */
export function searchable(text: string): string {
  return ` ${plain(text)}`
}

function plain(text: string): string {
  return (text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []).join(' ')
}

/** What a chip says of a condition: `stop reason = truncated`. A condition that cannot be read is shown as written. */
export function described(text: string): string {
  const found = /^\s*(\w+)\s*(!=|>=|<=|=|>|<|~)([\s\S]*)$/.exec(text)
  if (!found) return text
  const [, name = '', operator = '', value = ''] = found
  const sign = { '!=': '≠', '>=': '≥', '<=': '≤', '~': '∋' }[operator] ?? operator
  return `${name.replaceAll('_', ' ')} ${sign} ${value.trim()}`
}

/** `where` with the conditions on `name` (with one of `operators`) replaced by `value`; null takes them out. */
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
