"""The store's writes, each one script, so that comparing and writing are one step. Lua for Redis 6.2 and all that came after.

Every key is declared; there are no Functions, no expiry of hash fields and no time read from the server.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Script:
    """Its text, and the name by which a server that has run it knows it."""

    text: str

    @property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


TRIM = """
-- Makes room for one entry; a document goes with its entry.
local function trim(past, documents, length)
  while redis.call('XLEN', past) >= tonumber(length) do
    local oldest = redis.call('XRANGE', past, '-', '+', 'COUNT', 1)[1]
    local fields, e, r = oldest[2], '', ''
    for i = 1, #fields, 2 do
      if fields[i] == 'epoch' then e = fields[i + 1] elseif fields[i] == 'revision' then r = fields[i + 1] end
    end
    redis.call('XDEL', past, oldest[1])
    redis.call('HDEL', documents, e .. '.' .. r)
  end
end
"""

PUT = Script(
    TRIM
    + """
-- KEYS: meta, policy, log, past (people's writes), documents.
-- ARGV: 1 request id, 2 epoch and 3 revision built upon, 4 expected spec_version or '', 5 term and 6 holder of the lease or '',
--       7 the highest term that the writer knows, 8 epoch, 9 revision, 10 spec_version, 11 the document,
--       12 length of the log, 13 of the past, 14 entries in which a re-sent put is looked for, 15 'past' or '',
--       16 the digest built upon or '', then pairs for the entry.
local held = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'spec_version', 'term', 'term_holder')
local epoch, revision, version = held[1] or '0', held[2] or '0', held[3] or '0'
local term, holder = held[4] or '0', held[5] or ''
local moved = epoch ~= ARGV[2] or revision ~= ARGV[3]
-- Two stores that parted may hold the same numbers with other content.
moved = moved or (ARGV[16] ~= '' and redis.call('HGET', KEYS[2], 'sha256') ~= ARGV[16])
if moved then
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', ARGV[14])) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'request' and fields[i + 1] == ARGV[1] then
        -- Changes nothing, but is a write of this connection: a WAIT that follows speaks for all that came before it.
        redis.call('HSET', KEYS[1], 'spec_version', version)
        return {'WRITTEN', version}
      end
    end
  end
end
if ARGV[5] ~= '' and (ARGV[5] ~= term or ARGV[6] ~= holder) then return {'FENCED', term .. ' of ' .. holder} end
if ARGV[4] ~= '' and ARGV[4] ~= version then return {'VERSION', version} end
if moved then return {'MOVED', epoch .. '.' .. revision} end
redis.call('HSET', KEYS[1], 'epoch', ARGV[8], 'revision', ARGV[9], 'spec_version', ARGV[10])
if tonumber(ARGV[7]) > tonumber(term) then redis.call('HSET', KEYS[1], 'term', ARGV[7], 'term_holder', '') end
local pairs_ = {}
for i = 17, #ARGV do pairs_[#pairs_ + 1] = ARGV[i] end
redis.call('HSET', KEYS[2], 'document', ARGV[11], unpack(pairs_))
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[12], '*', 'request', ARGV[1], unpack(pairs_))
if ARGV[15] == 'past' then
  trim(KEYS[4], KEYS[5], ARGV[13])
  redis.call('XADD', KEYS[4], '*', 'request', ARGV[1], unpack(pairs_))
  redis.call('HSET', KEYS[5], ARGV[8] .. '.' .. ARGV[9], ARGV[11])
end
return {'WRITTEN', ARGV[10]}
"""
)

LEASE = Script("""
-- KEYS: leader, meta.  ARGV: 1 holder, 2 milliseconds, 3 the highest term that the caller knows.
local led = redis.call('HMGET', KEYS[1], 'holder', 'term')
local newest = redis.call('HGET', KEYS[2], 'term') or '0'
if led[1] and led[1] ~= ARGV[1] then return {led[1], led[2]} end
if led[1] and led[2] == newest and tonumber(led[2]) >= tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {led[1], led[2]}
end
local term = string.format('%.0f', math.max(tonumber(newest), tonumber(ARGV[3])) + 1)
redis.call('HSET', KEYS[2], 'term', term, 'term_holder', ARGV[1])
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'term', term)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {ARGV[1], term}
""")

RELEASE = Script("""
-- KEYS: leader.  ARGV: holder, term.
local led = redis.call('HMGET', KEYS[1], 'holder', 'term')
if led[1] == ARGV[1] and led[2] == ARGV[2] then return redis.call('DEL', KEYS[1]) end
return 0
""")

MARK = Script("""
-- KEYS: marks, marked.  ARGV: 1 key, 2 stamp, 3 data, 4 length of the stream, which only wakes those who wait.
local held = redis.call('HGET', KEYS[1], ARGV[1])
local mark = ARGV[2] .. ' ' .. ARGV[3]
if held and tonumber(string.match(held, '^%d+')) >= tonumber(ARGV[2]) then return held == mark and 1 or 0 end
redis.call('HSET', KEYS[1], ARGV[1], mark)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'key', ARGV[1])
return 1
""")

UNMARK = Script("""
-- KEYS: marks.  ARGV: key, stamp.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and string.match(held, '^%d+') == ARGV[2] then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
""")
