import { describe, expect, it } from 'vitest'

import type { Query } from '../src/lib/api'
import { type Exported, MemoryClient } from '../src/lib/memory'

function episode(i: number, more: object = {}): unknown {
  return {
    episode_id: `e${i}`, group_id: `g${i % 2}`, task_id: 't', step: i, split: 'train', attempt: i, time: i, query: `question ${i}`,
    stop_reason: 'completed', reward: i / 10, success: i > 3, error: '', seconds: 1, retries: 0, agents: ['a'], tools: [], prompt_tokens: 1, branches: 1,
    task: { init_messages: [], env_type: '', metadata: {} },
    turns: [{ index: 0, agent: 'a', external: false, response_tokens: 10 * (5 - i), request: [], reply: { role: 'assistant', content: `pear${i}` } }],
    samples: [], tokens: { has_text: true, note: '', turns: [] },
    ...more,
  }
}
const data = {
  format: 1, exported: 5, astuner: '0', run: { id: 'r', name: 'run', alarms: [] }, metrics: [{ step: 1 }], steps: { train: [] },
  groups: [{ group_id: 'g0' }, { group_id: 'g1' }], episodes: [1, 2, 3, 4].map((i) => episode(i)).concat([episode(5, { reward: null })]),
} as unknown as Exported
const client = new MemoryClient(data)
const ids = async (query: Partial<Query>): Promise<string[]> => {
  const page = await client.episodes('r', { where: [], order: 'written', desc: false, ...query }, 0, 100)
  return page.episodes.map((one) => one.episode_id)
}

describe('the exported page', () => {
  it('filters, sorts and pages as the server does', async () => {
    expect(await ids({ where: ['reward>=0.2', 'group=g0'] })).toEqual(['e2', 'e4'])
    expect(await ids({ where: ['text~pear3'] })).toEqual(['e3'])
    expect(await ids({ order: 'reward', desc: true })).toEqual(['e4', 'e3', 'e2', 'e1', 'e5'])
    expect(await ids({ order: 'tokens' })).toEqual(['e5', 'e4', 'e3', 'e2', 'e1'])
    expect(await ids({ desc: true })).toEqual(['e5', 'e4', 'e3', 'e2', 'e1'])
    expect(await client.episodes('r', { where: [], order: 'written', desc: false }, 3, 1)).toMatchObject({ total: 5, offset: 3, episodes: [{ episode_id: 'e4' }] })
    // asking did not turn the list around
    expect(await ids({})).toEqual(['e1', 'e2', 'e3', 'e4', 'e5'])
  })
  it('finds the place of an episode, and its groups', async () => {
    expect(await client.position('r', { where: ['step>2'], order: 'written', desc: false }, 'e4')).toBe(1)
    expect(await client.position('r', { where: ['step>4'], order: 'written', desc: false }, 'e4')).toBeNull()
    expect((await client.groups('r', ['step=2'], 0, 9)).groups).toEqual([{ group_id: 'g0' }])
  })
  it('has numbers in lists and whole things in episodes', async () => {
    expect((await client.episodes('r', { where: [], order: 'written', desc: false }, 0, 1)).episodes[0]).toMatchObject({ turns: 1, tokens: 40 })
    expect(await client.episode('r', 'e1')).toMatchObject({ turns: [{ index: 0 }], tokens: 40 })
    expect(await client.tokens('r', 'e1')).toEqual({ has_text: true, note: '', turns: [] })
  })
  it('says what it does not have', async () => {
    await expect(client.episode('r', 'gone')).rejects.toThrow('gone is not in this page')
    await expect(client.run('other')).rejects.toThrow('only')
    await expect(ids({ where: ['what'] })).rejects.toThrow('what: write a name')
    expect(() => new MemoryClient({ ...data, format: 2 })).toThrow('format 1')
  })
})
