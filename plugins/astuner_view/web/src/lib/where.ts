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

/** An episode with its searchable text (`searchable`), and the metadata of its task (`fieldsOf`). */
export type Searchable = Listed & { text: string; metadata: Map<string, string> }

const CONDITION = /^\s*([\w.-]+)\s*(!=|>=|<=|=|>|<|~)([\s\S]*)$/
const PREFIX = /^metadata\./

/**
 * @param fields metadata fields of tasks.
 * @throws Error with a message for the user.
 */
export function read(text: string, fields: ReadonlySet<string> = new Set()): Condition {
  const found = CONDITION.exec(text)
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
  } else if (!fields.has(name.replace(PREFIX, ''))) {
    throw new Error(`${name} is not a known name; use one of ${[...NAMES, ...fields].join(', ')}`)
  } else if (['<', '<=', '>', '>='].includes(operator) && (value === '' || Number.isNaN(Number(value)))) {
    throw new Error(`${value || 'an empty value'} is not a number`)
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
  if (name === 'text') return wordsOf(value).every((word) => episode.text.includes(` ${word}`))
  return meetsField(episode.metadata.get(name.replace(PREFIX, '')), operator, value)
}

function meetsField(have: string | undefined, operator: Condition['operator'], value: string): boolean {
  if (operator === '=' || operator === '!=') {
    return (have !== undefined && [have, metricName(have)].includes(value)) === (operator === '=')
  }
  if (operator === '~') return have?.toLowerCase().includes(value.toLowerCase()) ?? false
  return compared(have === undefined || have === '' || Number.isNaN(Number(have)) ? null : Number(have), operator, Number(value))
}

/** The scalars in a task's metadata; names of inner objects are dotted paths. */
export function fieldsOf(metadata: unknown, prefix = '', found = new Map<string, string>()): Map<string, string> {
  if (typeof metadata !== 'object' || metadata === null || Array.isArray(metadata)) return found
  for (const [name, value] of Object.entries(metadata)) {
    if (['string', 'number', 'boolean'].includes(typeof value)) found.set(metricName(prefix + name), String(value))
    else fieldsOf(value, `${prefix}${name}.`, found)
  }
  return found
}

/** A field or value as a part of a metric's name. */
export function metricName(text: string): string {
  return text.replace(/[^A-Za-z0-9_.-]+/g, '_').slice(0, 60) || 'empty'
}

/** The condition on a metadata field of tasks. */
export function fieldCondition(field: string): string {
  return NAMES.includes(field) ? `metadata.${field}` : field
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
  const found = CONDITION.exec(text)
  if (!found) return text
  const [, name = '', operator = '', value = ''] = found
  const sign = { '!=': '≠', '>=': '≥', '<=': '≤', '~': '∋' }[operator] ?? operator
  return `${name.replaceAll('_', ' ')} ${sign} ${value.trim()}`
}

/** `where` with the conditions on `name` (with one of `operators`) replaced by `value`; null removes them. */
export function withCondition(where: string[], name: string, operator: string, value: string | null): string[] {
  const start = new RegExp(`^\\s*${name.replaceAll('.', '\\.')}\\s*${operator.replace(/[<>=!~]/g, '\\$&')}(?!=)`)
  const others = where.filter((condition) => !start.test(condition))
  return value === null || value === '' ? others : [...others, `${name}${operator}${value}`]
}

/** The value of the condition on `name` with `operator`, or an empty text. */
export function valueOf(where: string[], name: string, operator: string): string {
  const start = new RegExp(`^\\s*${name.replaceAll('.', '\\.')}\\s*${operator.replace(/[<>=!~]/g, '\\$&')}(?!=)([\\s\\S]*)$`)
  for (const condition of where) {
    const found = start.exec(condition)
    if (found) return (found[1] ?? '').trim()
  }
  return ''
}
