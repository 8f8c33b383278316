/** Numbers, times and names as the page writes them. */

export const NONE = '–'

/** At most `digits` significant ones, without trailing zeros; small and large in powers of ten. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE
  if (value === 0) return '0'
  const size = Math.abs(value)
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 1)).replace('e+', 'e')
  if (Number.isInteger(value) || size >= 1000) return thousands(Math.round(value))
  return String(Number(value.toPrecision(digits)))
}

/** A number with its sign, which colors alone must not carry. */
export function signed(value: number | null | undefined, digits = 3): string {
  const text = number(value, digits)
  return value != null && value > 0 ? `+${text}` : text.replace(/^-/, '\u2212')
}

/** 1234567 -> 1 234 567, with thin spaces. */
export function thousands(value: number): string {
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, '\u2009')
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE
  const value = share * 100
  if (value > 0 && value < 0.05) return '<\u20090.1\u2009%'
  return `${value >= 99.95 || Math.abs(value) < 0.05 ? Math.round(value) : value.toFixed(1)}\u2009%`
}

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE
  if (seconds < 1) return `${Math.round(seconds * 1000)}\u2009ms`
  if (seconds < 60) return `${seconds.toFixed(1)}\u2009s`
  const whole = Math.round(seconds)
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60]
  if (h >= 100) return `${thousands(h)}\u2009h`
  return h > 0 ? `${h}\u2009h ${m}\u2009min` : m >= 10 ? `${m}\u2009min` : `${m}\u2009min ${s}\u2009s`
}

/** Remaining time, rounded as roughly as it is known. */
export function roughly(seconds: number): string {
  if (seconds < 60) return 'less than 1\u2009min'
  const minutes = Math.ceil(seconds / 60)
  return minutes < 60 ? `about ${minutes}\u2009min` : `about ${Math.floor(minutes / 60)}\u2009h ${minutes % 60}\u2009min`
}

/** How long ago, roughly; times in the future are "now". */
export function ago(time: number, now: number): string {
  const seconds = now - time
  if (seconds < 5) return 'now'
  if (seconds < 60) return `${Math.round(seconds)}\u2009s ago`
  if (seconds < 3600) return `${Math.round(seconds / 60)}\u2009min ago`
  if (seconds < 36 * 3600) return `${Math.round(seconds / 3600)}\u2009h ago`
  return `${Math.round(seconds / 86400)} days ago`
}

export function clock(time: number): string {
  const at = new Date(time * 1000)
  const two = (value: number): string => String(value).padStart(2, '0')
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`
}

/** `stop_reason`s and the like: context_overflow -> context overflow. */
export function words(name: string): string {
  return name.replaceAll('_', ' ')
}

/** "1 turn", "3 turns", "2 branches". */
export function count(value: number, noun: string, plural = `${noun}s`): string {
  return `${thousands(value)} ${value === 1 ? noun : plural}`
}

/** Long IDs shortened to their beginning and end, which distinguish them. */
export function shortId(id: string, most = 20): string {
  if (id.length <= most) return id
  const end = Math.floor((most - 1) / 2)
  return `${id.slice(0, most - 1 - end)}…${id.slice(-end)}`
}
