import { expect, it } from 'vitest'

import { grouped, isCurrent } from '../src/lib/alarms'
import type { Alarm } from '../src/lib/api'

const alarm = (step: number, message: string, severity: Alarm['severity'] = 'warning'): Alarm => ({ step, message, severity, time: step, rule: 'r', advice: '' })

it('alarms that say the same but for numbers are one', () => {
  const all = [alarm(1, '71 % alike'), alarm(2, '72.5 % alike'), alarm(2, 'broken', 'error'), alarm(3, '9 % alike'), alarm(3, '9 % alike', 'error')]
  expect(grouped(all).map((group) => group.map((one) => [one.step, one.message]))).toEqual([
    [[3, '9 % alike']],
    [[3, '9 % alike'], [2, '72.5 % alike'], [1, '71 % alike']],
    [[2, 'broken']],
  ])
  expect(grouped([])).toEqual([])
})

it('alarms are current as the report states, otherwise if they are recent', () => {
  expect([9, 8, 7].map((step) => isCurrent(alarm(step, ''), null, 10))).toEqual([true, true, false])
  const facts = { alarms: [{ rule: 'r', current: false }] }
  expect(isCurrent(alarm(10, ''), facts, 10)).toBe(false)
  const unknown = { alarms: [{ rule: 'r', current: true, last_step: null }] }
  expect([10, 7, 0].map((step) => isCurrent(alarm(step, ''), unknown, 10))).toEqual([true, false, true])
  expect(isCurrent({ ...alarm(1, ''), rule: 'effect' }, { alarms: [{ rule: 'r', with: ['effect'], current: true }] }, 10)).toBe(true)
})
