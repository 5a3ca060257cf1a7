-- Quotas in Redis: the twin of quota.py's arithmetic, run where usage is kept, each call atomic.
--
-- All keys of a tenant share the hash tag {tenant}, so that they are on one node of a Cluster:
--
--   PREFIX:{acme}:leases         sorted set: reservation -> when its lease ends, in ms
--   PREFIX:{acme}:reservations   hash: reservation -> "TOKENS ACCOUNT ACCOUNT", as in "120 key:k1 tenant:acme"
--   PREFIX:{acme}:key:k1         an account: requests, tokens, at_ms, live, spent, as quota.Usage has them, five
--                                doubles (packed: as text they took a quarter of each call)
--   PREFIX:{acme}:tenant:acme    another one
--   PREFIX:{acme}:settled:NAME   what a reservation had reserved, and when it was settled, for SETTLED_MS
--
-- KEYS      leases, reservations, then one account for each subject
-- ARGV      operation, reservation, now_ms, not_after_ms, lease_ttl_ms, two numbers of the operation; then for
--           each subject requests_per_min, tokens_per_min, concurrent, token_budget ('' is no limit)
--
-- Rules:
--
-- 1. Time is the server's: one clock for all gateways. A now_ms above 0 replaces it; tests alone send one.
-- 2. This script decides and charges. What a refusal means, and what windows show, quota.py works out from the
--    usage that is returned: the same numbers, so that there is one place for it.
-- 3. A call that is repeated changes nothing, and one that comes after not_after_ms, when its caller has given
--    up, does nothing: a stopped server finds such calls in its sockets when it goes on.
-- 4. Every number is whole and below 2^53, so a double holds it exactly.
-- 5. Nothing is written before everything is decided, so an error (out of memory, read-only) changes nothing.
--    An expired lease is taken away first, which is right whatever comes after it.
-- 6. Accounts of expired leases are no KEYS: they are not known before, and have the same hash tag.
--
-- Returns   {now_ms, answer, then for each subject requests, tokens, live, spent}, see each operation below.

local WEIGHT = 60000
local GRANT_SHARE = 4
local KEPT_MS = 2 * 86400000 -- longer than any request; an account that is empty by then is forgotten
local EXPIRED_MAX = 512 -- leases that one call takes away; the next call goes on
local SETTLED_MS = 10000 -- longer than a call that is sent again may take
local FIRST_LIMIT = 8

local leases, reservations = KEYS[1], KEYS[2]
local operation, reservation = ARGV[1], ARGV[2]
local now, not_after, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
if not_after > 0 and now > not_after then
  return redis.error_reply('LATE the caller has given up')
end

local function parse(value)
  local usage = {}
  if value then
    usage.requests, usage.tokens, usage.at, usage.live, usage.spent = struct.unpack('>ddddd', value)
  else
    usage.requests, usage.tokens, usage.at, usage.live, usage.spent = 0, 0, 0, 0, 0
  end
  return usage
end

local function show(usage)
  return struct.pack('>ddddd', usage.requests, usage.tokens, usage.at, usage.live, usage.spent)
end

local function drained(level, per_min, elapsed)
  return per_min and math.max(0, level - per_min * elapsed) or 0
end

-- The subjects' usage as it is now, each with its limits.
local function holdings()
  local found = {}
  if #KEYS == 2 then
    return found
  end
  local values = redis.call('MGET', unpack(KEYS, 3))
  for i, value in ipairs(values) do
    local at = FIRST_LIMIT + 4 * (i - 1)
    local usage = parse(value)
    usage.key = KEYS[i + 2]
    usage.rpm, usage.tpm = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    usage.concurrent, usage.budget = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local elapsed = now - usage.at
    if elapsed > 0 then
      usage.requests = drained(usage.requests, usage.rpm, elapsed)
      usage.tokens = drained(usage.tokens, usage.tpm, elapsed)
      usage.at = now
    end
    found[i] = usage
  end
  return found
end

local function save(usage)
  if usage.spent > 0 then
    redis.call('SET', usage.key, show(usage)) -- a budget is spent for good
    return
  end
  local empty_in = 0
  if usage.requests > 0 then
    empty_in = usage.requests / math.max(usage.rpm or 1, 1)
  end
  if usage.tokens > 0 then
    empty_in = math.max(empty_in, usage.tokens / math.max(usage.tpm or 1, 1))
  end
  redis.call('SET', usage.key, show(usage), 'PX', string.format('%.0f', KEPT_MS + math.ceil(empty_in)))
end

-- Leases that ran out: their seats are free again, their tokens stay charged.
local function expire()
  local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, EXPIRED_MAX)
  if #ended == 0 then
    return
  end
  local seats, prefix = {}, string.sub(leases, 1, -string.len('leases') - 1)
  for i, record in ipairs(redis.call('HMGET', reservations, unpack(ended))) do
    redis.call('ZREM', leases, ended[i])
    redis.call('HDEL', reservations, ended[i])
    for account in string.gmatch(record or '', ' (%S+)') do
      seats[account] = (seats[account] or 0) + 1
    end
  end
  for account, count in pairs(seats) do
    local value = redis.call('GET', prefix .. account)
    if value then
      local usage = parse(value)
      usage.live = math.max(0, usage.live - count)
      redis.call('SET', prefix .. account, show(usage), 'KEEPTTL')
    end
  end
end

local function fits(level, per_min, amount)
  return not per_min or level + amount * WEIGHT <= per_min * WEIGHT
end

local function allowed(subjects, seats, tokens)
  for _, usage in ipairs(subjects) do
    if seats > 0 and not (fits(usage.requests, usage.rpm, seats)
        and (not usage.concurrent or usage.live + seats <= usage.concurrent)) then
      return false
    end
    if tokens > 0 and not (fits(usage.tokens, usage.tpm, tokens)
        and (not usage.budget or usage.spent + tokens <= usage.budget)) then
      return false
    end
  end
  return true
end

local function grant(subjects, least, most)
  local left
  for _, usage in ipairs(subjects) do
    if usage.tpm then
      local here = math.floor(math.max(0, usage.tpm * WEIGHT - usage.tokens) / WEIGHT)
      left = math.min(left or here, here)
    end
    if usage.budget then
      local here = math.max(0, usage.budget - usage.spent)
      left = math.min(left or here, here)
    end
  end
  if least == most or not left then
    return most
  end
  return math.min(most, math.max(least, math.floor(left / GRANT_SHARE)))
end

local function charge(subjects, seats, tokens)
  for _, usage in ipairs(subjects) do
    usage.requests = usage.rpm and usage.requests + seats * WEIGHT or 0
    usage.tokens = usage.tpm and usage.tokens + tokens * WEIGHT or 0
    usage.live = usage.live + seats
    usage.spent = usage.budget and usage.spent + tokens or 0
    save(usage)
  end
end

-- `accounts`: the rest of the record, after the tokens.
local function book(tokens, accounts, is_new)
  redis.call('HSET', reservations, reservation, string.format('%.0f', tokens) .. accounts)
  if is_new then
    redis.call('ZADD', leases, now + ttl, reservation)
  end
end

local function accounts()
  local prefix_len, names = string.len(leases) - string.len('leases'), ''
  for i = 3, #KEYS do
    names = names .. ' ' .. string.sub(KEYS[i], prefix_len + 1)
  end
  return names
end

local function answer(result, subjects)
  local reply = { now, result }
  for _, usage in ipairs(subjects) do
    reply[#reply + 1] = usage.requests
    reply[#reply + 1] = usage.tokens
    reply[#reply + 1] = usage.live
    reply[#reply + 1] = usage.spent
  end
  return reply
end

local operations = {}

-- 0 when the seat is given, without the usage; -1 when it is refused.
function operations.enter()
  expire()
  if redis.call('HEXISTS', reservations, reservation) == 1 then
    return { now, 0 }
  end
  local subjects, needs_tokens = holdings(), tonumber(ARGV[6])
  if not allowed(subjects, 1, needs_tokens) then
    return answer(-1, subjects)
  end
  charge(subjects, 1, 0)
  book(0, accounts(), true)
  return { now, 0 }
end

-- The tokens that are granted, and the usage after that; -1 when refused with a seat, -2 without one.
function operations.reserve()
  expire()
  local subjects, least, most = holdings(), tonumber(ARGV[6]), tonumber(ARGV[7])
  local record = redis.call('HGET', reservations, reservation)
  local reserved = record and tonumber(string.match(record, '^%d+')) or 0
  if reserved > 0 then
    return answer(reserved, subjects)
  end
  local seats = record and 0 or 1
  if not allowed(subjects, seats, least) then
    return answer(-1 - seats, subjects)
  end
  local granted = grant(subjects, least, most)
  charge(subjects, seats, granted)
  book(granted, accounts(), not record)
  return answer(granted, subjects)
end

-- The tokens that were reserved; -1 when there is no such reservation. A settlement whose reply was lost is sent
-- again: it changes nothing, and has the same answer.
function operations.settle()
  expire()
  local record = redis.call('HGET', reservations, reservation)
  local trace = string.sub(leases, 1, -string.len('leases') - 1) .. 'settled:' .. reservation
  if not record then
    local before, at = string.match(redis.call('GET', trace) or '', '^(%d+) (%d+)$')
    local is_recent = at and now - tonumber(at) < SETTLED_MS
    return { now, is_recent and tonumber(before) or -1 }
  end
  local reserved, used = tonumber(string.match(record, '^%d+')), tonumber(ARGV[6])
  for _, usage in ipairs(holdings()) do
    local difference = used - reserved
    usage.tokens = usage.tpm and math.max(0, usage.tokens + difference * WEIGHT) or 0
    usage.live = math.max(0, usage.live - 1)
    usage.spent = usage.budget and math.max(0, usage.spent + difference) or 0
    save(usage)
  end
  redis.call('HDEL', reservations, reservation)
  redis.call('ZREM', leases, reservation)
  redis.call('SET', trace, string.format('%.0f %.0f', reserved, now), 'PX', SETTLED_MS)
  return { now, reserved }
end

-- The reservations stand from the eighth argument on; those that are gone are passed over.
function operations.renew()
  expire()
  for i = FIRST_LIMIT, #ARGV do
    redis.call('ZADD', leases, 'XX', now + ttl, ARGV[i])
  end
  redis.call('PEXPIRE', leases, KEPT_MS)
  redis.call('PEXPIRE', reservations, KEPT_MS)
  return { now, 0 }
end

-- Writes nothing, so that a server that refuses writes still tells how things stand.
function operations.windows()
  return answer(0, holdings())
end

-- Whether the server takes writes, at a key of its own.
function operations.probe()
  redis.call('SET', KEYS[1], now, 'PX', 60000)
  return { now, 0 }
end

return operations[operation]()
