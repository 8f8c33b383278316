import { svelte, vitePreprocess } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

import { licences, singleFile } from './build/artefacts.ts'
import { spelledOut } from './build/spelled.ts'

/** API for `npm run dev`: a running `astuner view`, or the mock. */
const api = process.env['ASTUNER_VIEW'] ?? 'http://127.0.0.1:8181'

export default defineConfig({
  plugins: [svelte({ preprocess: [vitePreprocess(), spelledOut()] }), singleFile(), licences()],
  base: './',
  build: {
    outDir: '../astuner_view/static',
    emptyOutDir: true,
    target: 'es2022',
    sourcemap: false,
    modulePreload: false,
    chunkSizeWarningLimit: 1000,
    rolldownOptions: {
      // Names without hashes: builds are identical on every machine, and the server sends no-store.
      output: {
        codeSplitting: false,
        entryFileNames: 'assets/app.js',
        assetFileNames: 'assets/app[extname]',
      },
    },
  },
  server: { proxy: { '/api': api } },
  test: { include: ['test/**/*.test.ts'] },
})
