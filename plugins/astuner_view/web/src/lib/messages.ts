/** Messages as agents send them, made readable. Their content is untrusted: this module returns only text. */
import type { Message, ToolCall } from './api'

export interface Part {
  kind: 'text' | 'reasoning' | 'json'
  text: string
}

/** Content as text: a string, parts, or anything else as JSON. */
export function textOf(content: unknown): string {
  if (content === null || content === undefined) return ''
  if (typeof content === 'string') return content
  if (Array.isArray(content)) return content.map(partText).join('\n')
  return JSON.stringify(content, null, 2)
}

function partText(part: unknown): string {
  if (typeof part === 'string') return part
  if (typeof part === 'object' && part !== null && 'text' in part && typeof part.text === 'string') return part.text
  return JSON.stringify(part, null, 2)
}

/** Parts of a message: reasoning (its own field, or `<think>` in the text), then text or JSON. */
export function partsOf(message: Message): Part[] {
  const parts: Part[] = []
  const reasoning = textOf(message.reasoning_content ?? message.reasoning)
  if (reasoning.trim() !== '') parts.push({ kind: 'reasoning', text: reasoning })
  let text = textOf(message.content)
  const thought = message.role === 'assistant' ? /^\s*<think>([\s\S]*?)(?:<\/think>|$)/.exec(text) : null
  if (thought) {
    if ((thought[1] ?? '').trim() !== '') parts.push({ kind: 'reasoning', text: (thought[1] ?? '').trim() })
    text = text.slice(thought[0].length).replace(/^\s+/, '')
  }
  if (text !== '') parts.push(message.role === 'tool' ? jsonOr(text) : { kind: 'text', text })
  return parts
}

function jsonOr(text: string): Part {
  const pretty = prettyJson(text)
  return pretty === null ? { kind: 'text', text } : { kind: 'json', text: pretty }
}

/** JSON of an object or a list, indented; null where the text is something else. */
export function prettyJson(text: string): string | null {
  if (!/^\s*[[{]/.test(text) || text.length > 200_000) return null
  try {
    return JSON.stringify(JSON.parse(text), null, 2)
  } catch (e) {
    if (e instanceof SyntaxError) return null
    throw e
  }
}

export interface Call {
  id: string
  name: string
  args: string
  /** The arguments are valid JSON. */
  valid: boolean
}

export function callsOf(message: Message): Call[] {
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : []
  return calls.filter((call): call is ToolCall => typeof call === 'object' && call !== null).map(callOf)
}

function callOf(call: ToolCall): Call {
  const given = call.function?.arguments
  const text = typeof given === 'string' ? given : JSON.stringify(given ?? {})
  const pretty = prettyJson(text)
  return {
    id: String(call.id ?? ''),
    name: String(call.function?.name ?? '(unnamed call)'),
    args: pretty ?? text,
    valid: pretty !== null,
  }
}

export interface Piece {
  kind: 'key' | 'string' | 'number' | 'word' | 'plain'
  text: string
}

/** JSON in pieces for highlighting; joined, they are the text. */
export function jsonPieces(text: string): Piece[] {
  const pieces: Piece[] = []
  const pattern = /("(?:[^"\\]|\\.)*")(\s*:)?|(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|\b(true|false|null)\b/g
  let at = 0
  for (const found of text.matchAll(pattern)) {
    if (found.index > at) pieces.push({ kind: 'plain', text: text.slice(at, found.index) })
    if (found[1] !== undefined) {
      pieces.push({ kind: found[2] === undefined ? 'string' : 'key', text: found[1] })
      if (found[2] !== undefined) pieces.push({ kind: 'plain', text: found[2] })
    } else {
      pieces.push({ kind: found[3] === undefined ? 'word' : 'number', text: found[0] })
    }
    at = found.index + found[0].length
  }
  if (at < text.length) pieces.push({ kind: 'plain', text: text.slice(at) })
  return pieces
}

/** All words of a conversation, for the exported page's search. */
export function searchText(messages: Message[]): string {
  const parts: string[] = []
  for (const message of messages) {
    parts.push(textOf(message.content), textOf(message.reasoning_content ?? message.reasoning))
    for (const call of callsOf(message)) parts.push(call.name, call.args)
  }
  return parts.filter((part) => part !== '').join('\n')
}
