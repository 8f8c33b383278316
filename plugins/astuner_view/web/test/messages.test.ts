import { describe, expect, it } from 'vitest'

import { callsOf, jsonPieces, partsOf, prettyJson, searchText, textOf } from '../src/lib/messages'

describe('messages', () => {
  it('read content of any shape', () => {
    expect(textOf(null)).toBe('')
    expect(textOf('a')).toBe('a')
    expect(textOf(['a', { type: 'text', text: 'b' }])).toBe('a\nb')
    expect(textOf([{ type: 'image' }])).toContain('"image"')
    expect(textOf({ a: 1 })).toBe('{\n  "a": 1\n}')
  })
  it('part reasoning from text', () => {
    const kinds = (parts: { kind: string; text: string }[]): [string, string][] => parts.map((part) => [part.kind, part.text])
    expect(kinds(partsOf({ role: 'assistant', content: '<think>hm\n</think>\n\nyes' }))).toEqual([['reasoning', 'hm'], ['text', 'yes']])
    expect(kinds(partsOf({ role: 'assistant', content: '<think>cut off' }))).toEqual([['reasoning', 'cut off']])
    expect(kinds(partsOf({ role: 'assistant', reasoning_content: 'r', content: 't' }))).toEqual([['reasoning', 'r'], ['text', 't']])
    expect(kinds(partsOf({ role: 'user', content: '<think>mine</think>' }))).toEqual([['text', '<think>mine</think>']])
  })
  it('print the JSON of tools, and leave other text alone', () => {
    expect(partsOf({ role: 'tool', content: '{"a":[1]}' })).toEqual([{ kind: 'json', text: '{\n  "a": [\n    1\n  ]\n}' }])
    expect(partsOf({ role: 'tool', content: '{broken' })[0]).toEqual({ kind: 'text', text: '{broken' })
    expect(prettyJson('17')).toBeNull()
  })
  it('read calls whatever they look like', () => {
    expect(callsOf({ tool_calls: [{ id: 'c', function: { name: 'f', arguments: '{"x":1}' } }] })).toEqual([
      { id: 'c', name: 'f', args: '{\n  "x": 1\n}', valid: true },
    ])
    expect(callsOf({ tool_calls: [{ function: { name: 'f', arguments: 'x=1' } }] })[0]).toMatchObject({ args: 'x=1', valid: false })
    expect(callsOf({ tool_calls: [{ function: { name: 'f', arguments: { x: 1 } } }] })[0]).toMatchObject({ valid: true })
    expect(callsOf({ tool_calls: null })).toEqual([])
  })
  it('cut JSON into pieces that are the text again', () => {
    const text = JSON.stringify({ a: 'q"\\', n: -1.5e3, t: [true, null], '<b>': '</script>' }, null, 2)
    const pieces = jsonPieces(text)
    expect(pieces.map((piece) => piece.text).join('')).toBe(text)
    expect(pieces.filter((piece) => piece.kind === 'key').map((piece) => piece.text)).toEqual(['"a"', '"n"', '"t"', '"<b>"'])
  })
  it('can be searched', () => {
    expect(searchText([{ content: 'a', tool_calls: [{ function: { name: 'f', arguments: '{"q":"b"}' } }] }])).toMatch(/a[\s\S]*f[\s\S]*b/)
  })
})
