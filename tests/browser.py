"""Headless Chromium, driven over a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason='there is no Chromium: apt-get install chromium')
KEYS = {'Tab': 9, 'Enter': 13, 'ArrowRight': 39, 'ArrowLeft': 37, '0': 48, '1': 49, ' ': 32}


class Browser:
    """One tab. Everything that it logs, throws or asks a network for is in events."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 800, dark: bool = False):
        (read, self.write), (self.read, write) = os.pipe(), os.pipe()

        def pipes() -> None:
            """Chromium reads descriptor 3 and writes 4."""
            ends = os.dup(read), os.dup(write)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--remote-debugging-pipe',
             '--hide-scrollbars', f'--user-data-dir={folder}/browser',
             f'--blink-settings=preferredColorScheme={int(not dark)}'],
            preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self.n, self.rest, self.session, self.events = 0, b'', None, []
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self.session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.call(f'{domain}.enable')
        self.resize(width, height)

    def __enter__(self) -> 'Browser':
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def call(self, method: str, **params) -> dict:
        """The result of a command of the protocol."""
        self.n += 1
        message = {'id': self.n, 'method': method, 'params': params}
        message |= {'sessionId': self.session} if self.session else {}
        data = json.dumps(message).encode() + b'\0'
        while data:
            data = data[os.write(self.write, data):]
        while True:
            while b'\0' not in self.rest:
                self.rest += os.read(self.read, 1 << 20) or pytest.fail('Chromium has ended')
            text, _, self.rest = self.rest.partition(b'\0')
            answer = json.loads(text)
            if answer.get('id') == self.n:
                assert 'error' not in answer, answer
                return answer['result']
            self.events.append(answer)

    def open(self, page: Path, fragment: str = '') -> None:
        """Load a page and wait until its model is ready."""
        self.call('Page.navigate', url='about:blank')
        self.call('Page.navigate', url=page.resolve().as_uri() + fragment)
        self.run('new Promise(r => document.readyState === "complete" ? r() : addEventListener("load", r))')
        self.run('window.rucksack.ready')

    def run(self, script: str) -> object:
        """The value of an expression in the page, or what its promise gives; AssertionError if it throws."""
        answer = self.call('Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in answer, answer['exceptionDetails']
        return answer['result'].get('value')

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key, with modifiers 8 for shift."""
        text = {'text': {'Enter': '\r'}.get(key, key)} if len(key) == 1 or key == 'Enter' else {}
        for kind in ('keyDown', 'keyUp'):
            self.call('Input.dispatchKeyEvent', type=kind, key=key, modifiers=modifiers, code=key,
                      windowsVirtualKeyCode=KEYS[key], **(text if kind == 'keyDown' else {}))

    def click(self, x: float, y: float) -> None:
        """A click of the left button."""
        for kind in ('mousePressed', 'mouseReleased'):
            self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def resize(self, width: int, height: int) -> None:
        """The window, of a phone where it is narrow."""
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1,
                  mobile=min(width, height) < 500)

    def picture(self, file: Path) -> None:
        """What the window shows, as a PNG."""
        file.write_bytes(base64.b64decode(self.call('Page.captureScreenshot')['data']))

    def complaints(self) -> list[str]:
        """What the console got, what was thrown, and what was fetched but files, data and blobs."""
        found = [json.dumps(event) for event in self.events if event.get('method') in (
            'Runtime.consoleAPICalled', 'Runtime.exceptionThrown', 'Log.entryAdded')]
        urls = [event['params']['request']['url'] for event in self.events
                if event.get('method') == 'Network.requestWillBeSent']
        return found + [url for url in urls if not url.startswith(('file:', 'data:', 'blob:', 'about:'))]
