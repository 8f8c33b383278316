/** Additional build outputs: the page as one file, and the licenses of bundled packages. */
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'

import type { Plugin, Rollup } from 'vite'

const DATA = '<script type="application/json" id="astuner-data">null</script>'

/**
 * `export.html`: everything inline, one style and one script, so that the server can allow exactly these two by
 * their hashes. The server replaces the `null` of the data line.
 */
export function singleFile(): Plugin {
  return {
    name: 'astuner-single-file',
    enforce: 'post',
    generateBundle: {
      order: 'post',
      handler(_options: unknown, bundle: Rollup.OutputBundle) {
        const outputs = Object.values(bundle)
        const scripts = outputs.filter((o) => o.type === 'chunk')
        const styles = outputs.filter((o) => o.type === 'asset' && o.fileName.endsWith('.css'))
        if (scripts.length !== 1 || styles.length !== 1) {
          throw new Error(`export.html holds one script and one style, not ${scripts.length} and ${styles.length}`)
        }
        const script = (scripts[0] as Rollup.OutputChunk).code.trim()
        const style = String((styles[0] as Rollup.OutputAsset).source).trim()
        if (/<\/style/i.test(style)) throw new Error('the style would end early: it holds "</style"')
        this.emitFile({ type: 'asset', fileName: 'export.html', source: page(escaped(script), style) })
      },
    },
  }
}

/** These occur only in strings and templates, where the escaped form is equivalent. */
function escaped(script: string): string {
  return script.replace(/<\/(script)/gi, '<\\/$1').replace(/<!--/g, '<\\!--')
}

function page(script: string, style: string): string {
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>ASTuner</title>
<link rel="icon" href="data:,">
<style>${style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This page needs JavaScript, which it brings itself; nothing is loaded from elsewhere.</noscript>
${DATA}
<script type="module">${script}</script>
</body>
</html>
`
}

/** `licences.txt`: the licence texts of the packages whose code is in the bundle, as they require. */
export function licences(): Plugin {
  return {
    name: 'astuner-licences',
    generateBundle(_options: unknown, bundle: Rollup.OutputBundle) {
      const folders = new Set<string>()
      for (const output of Object.values(bundle)) {
        if (output.type !== 'chunk') continue
        for (const id of Object.keys(output.modules)) {
          const found = /^(.*\/node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(id.replaceAll('\\', '/'))
          if (found?.[1]) folders.add(found[1])
        }
      }
      const texts = [...folders].map(licenceOf).sort()
      this.emitFile({ type: 'asset', fileName: 'licences.txt', source: texts.join('\n') })
    },
  }
}

function licenceOf(folder: string): string {
  const about = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8')) as Record<string, string>
  const file = readdirSync(folder).find((name) => /^licen[cs]e/i.test(name))
  const text = file && existsSync(join(folder, file)) ? readFileSync(join(folder, file), 'utf8').trim() : ''
  return `${about['name']} ${about['version']} (${about['license']})\n\n${text}\n`
}
