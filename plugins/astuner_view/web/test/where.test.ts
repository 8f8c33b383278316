import { describe, expect, it } from 'vitest'

import { described, fieldCondition, fieldsOf, meets, read, searchable, type Searchable, valueOf, withCondition } from '../src/lib/where'

const episode = {
  episode_id: 'e1', group_id: 'g1', task_id: 't1', step: 12, split: 'train', attempt: 0, time: 1, query: 'What is 17 * 23?',
  stop_reason: 'completed', reward: 0.5, success: true, error: '', seconds: 2, retries: 0, agents: ['wolf', 'seer'],
  tools: ['search'], turns: 3, tokens: 200, prompt_tokens: 90, branches: 1, label: 'bad', why: 'off by one', cause: '', answer: '391', expected: '391', text: searchable('What is 17 * 23? An Äpfel apple_pie.'),
  metadata: fieldsOf({ layout: 'two columns', size: { pages: 3 }, split: 'odd', tags: ['a'] }),
} satisfies Searchable
const failed = { ...episode, reward: null, success: null, agents: ['wolves'], error: 'KeyError: 17', cause: 'KeyError: #', label: '', why: '' } satisfies Searchable
const met = (condition: string, of: Searchable = episode): boolean => meets(of, [read(condition, new Set(of.metadata.keys()))])

describe('conditions', () => {
  it.each([
    'step=12', 'step!=11', 'step>11', 'step>=12', 'step<13', 'step<=12', 'reward >= 0.5', 'reward!=none', 'split=train',
    'split!=validation', 'query~WHAT IS', 'agent=wolf', 'agent!=wolves', 'tool=search', 'success=true', 'group=g1', 'task=t1',
    'episode=e1', 'error=', 'label=bad', 'label!=none', 'why~OFF', 'text~17 apple', 'text~äpf', 'text~apple_pie', 'text~pie',
    'layout=two columns', 'layout=two_columns', 'layout~COL', 'size.pages>2', 'layout!=one', 'metadata.split=odd',
  ])('%s is met', (condition) => expect(met(condition)).toBe(true))
  it.each(['step=11', 'step>12', 'reward>0.5', 'split=validation', 'agent=wol', 'tool!=search', 'success=false', 'text~pple', 'text~17 pear', 'query~apple', 'reward=none', 'layout=two', 'size.pages>3'])(
    '%s is not', (condition) => expect(met(condition)).toBe(false),
  )
  it('an episode without a value meets none on it but !=', () => {
    expect(met('reward=none', failed)).toBe(true)
    expect(met('reward!=0', failed)).toBe(true)
    for (const condition of ['reward>=0', 'reward<1', 'reward=0', 'reward!=none']) expect(met(condition, failed)).toBe(false)
    expect(met('success=none', failed)).toBe(true)
    expect(met('agent=wolf', failed)).toBe(false)
    for (const condition of ['label=none', 'label!=bad', 'cause=KeyError: #']) expect(met(condition, failed)).toBe(true)
    expect(met('label=none')).toBe(false)
  })
  it('name metadata fields, with a prefix where a column has the same name', () => {
    expect([fieldCondition('layout'), fieldCondition('split')]).toEqual(['layout', 'metadata.split'])
  })
  it('all must hold', () => {
    expect(meets(episode, ['step=12', 'tool=search'].map((one) => read(one)))).toBe(true)
    expect(meets(episode, ['step=12', 'tool=none'].map((one) => read(one)))).toBe(false)
    expect(meets(episode, [])).toBe(true)
  })
  it.each([
    ['nonsense', 'write a name'], ['colour=red', 'colour is not a known name'], ['step~1', 'step is a number'], ['step>x', 'x is not a number'],
    ['split>a', 'split is text'], ['agent~a', 'agent is a list of names'], ['success=maybe', 'success must be'], ['text=a', 'text is searched'], ['text~ !', 'text is searched'],
  ])('%s is refused', (condition, words) => expect(() => read(condition)).toThrow(words))
})

describe('chips', () => {
  it('say what they ask', () => {
    expect(described('stop_reason=truncated')).toBe('stop reason = truncated')
    expect(described('reward>=0.5')).toBe('reward ≥ 0.5')
    expect(described('what?')).toBe('what?')
  })
  it('replace one condition and leave the others', () => {
    const where = ['reward>=0.5', 'reward>0', 'agent=a']
    expect(valueOf(where, 'reward', '>=')).toBe('0.5')
    expect(valueOf(where, 'reward', '>')).toBe('0')
    expect(valueOf(where, 'agent', '!=')).toBe('')
    expect(withCondition(where, 'reward', '>=', '0.7')).toEqual(['reward>0', 'agent=a', 'reward>=0.7'])
    expect(withCondition(where, 'reward', '>', null)).toEqual(['reward>=0.5', 'agent=a'])
  })
})
