import type { Alarm, VerdictFacts } from './api'

/** Newest first, errors before warnings of the same step; alarms that differ only in numbers form one group. */
export function grouped(alarms: Alarm[]): [Alarm, ...Alarm[]][] {
  const sorted = alarms.toSorted(
    (a, b) => b.step - a.step || Number(b.severity === 'error') - Number(a.severity === 'error'),
  )
  const groups = new Map<string, [Alarm, ...Alarm[]]>()
  for (const alarm of sorted) {
    const key = JSON.stringify([alarm.severity, alarm.rule, String(alarm.message).replace(/\d+([.,]\d+)*/g, '#')])
    const group = groups.get(key)
    if (group) group.push(alarm)
    else groups.set(key, [alarm])
  }
  return [...groups.values()]
}

/** Steps after which an alarm is past, if the report does not state it. */
const RECENT = 3

/**
 * Whether an alarm still holds: as the report states, unless the metrics do not show its rule's findings. Then it holds
 * if it was raised in the last steps, or before the first step, about the tasks.
 */
export function isCurrent(alarm: Alarm, facts: VerdictFacts | null, step: number): boolean {
  const known = facts?.alarms?.find(({ rule, with: others }) => rule === alarm.rule || others?.includes(alarm.rule))
  const recent = alarm.step === 0 || alarm.step > step - RECENT
  return known?.current === true && known.last_step === null ? recent : (known?.current ?? recent)
}
