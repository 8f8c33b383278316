import { describe, expect, it } from 'vitest'

import { above, compareRoute, episodeRoute, episodesRoute, format, listed, parse, type Place, type Route, runRoute } from '../src/lib/routes'

describe('addresses', () => {
  const routes: Route[] = [
    { page: 'runs' },
    runRoute('r'),
    runRoute('a b/c?d#e%', { tab: 'steps', step: 12, split: 'validation', metrics: ['val/success', 'a&b=c'] }),
    episodesRoute('r', { where: ['reward>=0.5', 'text~apple & pie', 'agent=<img>'], order: 'reward', desc: true }),
    episodeRoute('r', 'draw/7#0 %', { view: 'tokens', turn: 0, token: 1234, branch: 5 }),
    episodeRoute('日本', 'e'),
    compareRoute(['r', 'a b&run=c']),
    compareRoute(['r', 's', 't'], {
      a: 2, b: 0, stepA: 5, stepB: 0, byText: true, metrics: ['a&b'], episodes: [{ run: 'r', episode: 'draw/7#0 %' }, { run: 's', episode: '' }],
    }),
  ]
  it.each(routes.map((route) => [format(route), route] as const))('%s', (hash, route) => {
    expect(parse(hash)).toEqual(route)
  })
  it('are those of the contract', () => {
    expect(format(episodeRoute('R', 'E', { view: 'tokens', turn: 2, token: 7 }))).toBe('#/run/R/episode/E?view=tokens&turn=2&token=7')
    expect(parse('#/run/R/episodes?where=step%3D1&where=reward%3E0&order=reward&desc=1')).toEqual(
      episodesRoute('R', { where: ['step=1', 'reward>0'], order: 'reward', desc: true }),
    )
    expect(parse('')).toEqual({ page: 'runs' })
  })
  it.each(['#/nowhere', '#/run', '#/run/a/b/c/d', '#/run/a/episodes/x', '#/run/%'])('%s is none', (hash) => {
    expect(parse(hash)).toEqual({ page: 'unknown', hash })
  })
  it('take nothing strange for a view or a number', () => {
    expect(parse('#/run/R/episode/E?view=hack&turn=-1&token=1e9')).toEqual(episodeRoute('R', 'E'))
  })
  it('know what is above', () => {
    expect(above(episodeRoute('R', 'E'))).toEqual(episodesRoute('R'))
    expect(above(episodesRoute('R'))).toEqual(runRoute('R'))
    expect(above(runRoute('R'))).toEqual({ page: 'runs' })
    expect(above({ page: 'runs' })).toBeNull()
    const compared = compareRoute(['r', 's'], { stepA: 5 })
    expect(above(compared)).toEqual({ page: 'runs' })
    const both: [Place, Place] = [{ run: 'r', episode: 'e' }, { run: 's', episode: 'e' }]
    expect(above({ ...compared, episodes: both })).toEqual(compared)
  })
  it('ask the API as they are written', () => {
    expect(listed({ where: ['a=b'], order: 'written', desc: false }).toString()).toBe('where=a%3Db')
  })
})
