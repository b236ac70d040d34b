// Compiles src/ with the pinned wasm solc and writes artifacts/. `--check` writes nothing and fails when any byte differs.
//
// Output depends on the sources, package-lock.json and the settings below only: no paths, no times, no metadata hash.
// src/*.sol goes to artifacts/<Contract>.json, src/test/*.sol (hostile tokens and callers) to artifacts/test/<Contract>.json.
'use strict';
const fs = require('fs');
const path = require('path');
const solc = require('solc');

const ROOT = path.join(__dirname, '..');
const ARTIFACTS = path.join(ROOT, 'artifacts');
const CODE_BYTES_MAX = 24576; // EIP-170
// 2394: transient storage needs care. OpenZeppelin's reentrancy guard takes it: it clears its slot at the end of each call.
const WARNINGS_ACCEPTED = new Set(['2394']);
const SETTINGS = {
  optimizer: { enabled: true, runs: 1000 },
  evmVersion: 'cancun',
  metadata: { bytecodeHash: 'none', appendCBOR: false },
};

function readSources() {
  const sources = {};
  for (const directory of ['src', 'src/test']) {
    for (const name of fs.readdirSync(path.join(ROOT, directory)).sort()) {
      if (name.endsWith('.sol')) {
        sources[`${directory}/${name}`] = { content: fs.readFileSync(path.join(ROOT, directory, name), 'utf8') };
      }
    }
  }
  return sources;
}

function resolveImport(name) {
  try {
    return { contents: fs.readFileSync(require.resolve(name), 'utf8') };
  } catch (error) {
    return { error: `${name}: ${error.message} (run npm ci in contracts/)` };
  }
}

function compile() {
  const input = {
    language: 'Solidity',
    sources: readSources(),
    settings: {
      ...SETTINGS,
      outputSelection: { '*': { '*': ['abi', 'evm.bytecode.object', 'evm.deployedBytecode.object'] } },
    },
  };
  const output = JSON.parse(solc.compile(JSON.stringify(input), { import: resolveImport }));
  const messages = (output.errors || []).filter((message) => !WARNINGS_ACCEPTED.has(message.errorCode));
  for (const message of messages) console.error(message.formattedMessage);
  if (messages.length > 0) throw new Error('the compiler complained; warnings count as errors');
  return output.contracts;
}

function renderArtifacts(contracts) {
  const files = new Map();
  for (const [source, units] of Object.entries(contracts)) {
    if (!source.startsWith('src/')) continue;
    for (const [name, unit] of Object.entries(units)) {
      const code = unit.evm.deployedBytecode.object;
      const isInlined = !unit.abi.some((entry) => entry.type === 'function'); // a library of internal functions
      if (code === '' || isInlined) continue; // interfaces and abstract contracts have no code
      if (code.length / 2 > CODE_BYTES_MAX) throw new Error(`${name} has ${code.length / 2} bytes, limit ${CODE_BYTES_MAX}`);
      const artifact = {
        contractName: name,
        compiler: solc.version(),
        settings: SETTINGS,
        abi: unit.abi,
        bytecode: '0x' + unit.evm.bytecode.object,
        deployedBytecode: '0x' + code,
      };
      const file = source.startsWith('src/test/') ? `test/${name}.json` : `${name}.json`;
      files.set(file, { text: JSON.stringify(artifact, null, 1) + '\n', bytes: code.length / 2 });
    }
  }
  return files;
}

function listArtifacts(directory = '') {
  const full = path.join(ARTIFACTS, directory);
  if (!fs.existsSync(full)) return [];
  return fs.readdirSync(full, { withFileTypes: true }).flatMap((entry) => {
    const name = path.posix.join(directory, entry.name);
    return entry.isDirectory() ? listArtifacts(name) : [name];
  });
}

function check(files) {
  const stale = [...files].filter(([name, { text }]) => {
    const file = path.join(ARTIFACTS, name);
    return !fs.existsSync(file) || fs.readFileSync(file, 'utf8') !== text;
  });
  const extra = listArtifacts().filter((name) => !files.has(name));
  const wrong = [...stale.map(([name]) => name), ...extra];
  if (wrong.length > 0) throw new Error(`artifacts differ from the sources: ${wrong.join(', ')}; run node tools/build.js`);
}

function write(files) {
  fs.mkdirSync(path.join(ARTIFACTS, 'test'), { recursive: true });
  for (const name of listArtifacts()) if (!files.has(name)) fs.unlinkSync(path.join(ARTIFACTS, name));
  for (const [name, { text }] of files) fs.writeFileSync(path.join(ARTIFACTS, name), text);
}

try {
  const files = renderArtifacts(compile());
  if (process.argv.includes('--check')) check(files);
  else write(files);
  for (const [name, { bytes }] of files) console.log(`${name}: ${bytes} bytes`);
} catch (error) {
  console.error(error.message);
  process.exit(1);
}
