-- Quotas in Redis: the twin of quota.py's arithmetic and of usage.py's rows, run where usage is kept, each call
-- atomic.
--
-- In a Cluster all keys of a tenant share the hash tag {acme}, so that they are on one node. Elsewhere the
-- leases of all tenants are together, without a tag, as are those that lapsed: whoever calls next finds those that
-- ran out.
--
--   PREFIX:leases                sorted set: reservation -> when its lease ends, in ms
--   PREFIX:reservations          hash: reservation -> "TOKENS RESERVED_MS USAGE ROW ACCOUNT ACCOUNT", where USAGE
--                                is the beginning of the key of the row that it is counted in, and USAGE and
--                                ROW are - as long as nothing was granted. What no limit counts has no ACCOUNT
--   PREFIX:{acme}:key:k1         an account: requests, tokens, at_ms, live, spent, day, month, requests_at_ms,
--                                tokens_at_ms, as quota.Account has them, nine doubles (packed: as text they
--                                took a quarter of each call)
--   PREFIX:{acme}:tenant:acme    another one
--   PREFIX:{acme}:settled:NAME   what a reservation had reserved, and when it was settled, for SETTLED_MS
--   PREFIX:{acme}:late:NAME      a granted reservation whose lease ran out: who made it may live after all, and say
--                                what was used
--   PREFIX:model:qwen            another one, of all tenants; not in a Cluster
--   PREFIX:{acme}:usage:20780    hash: "KEY/MODEL" -> usage.Totals of that day, six doubles packed
--   PREFIX:{acme}:posted:GATEWAY the number of the last rows that this gateway posted
--   PREFIX:lapsed                sorted set: "RESERVATION TOKENS RESERVED_MS USAGE ROW" of a lease that ran out and
--                                has no billing line yet -> when it may be given to a gateway, in ms
--
-- KEYS      leases, reservations, then one account for each subject
-- ARGV      operation, settings, reservation, numbers, then the words of the operation. The settings and the
--           numbers are doubles, packed. Settings: lease_ttl_ms, days_kept, and for each subject requests_per_min,
--           tokens_per_min, concurrent, token_budget, tokens_per_day, tokens_per_month (negative is no limit); a
--           gateway puts together all up to them once for each caller. Numbers: now_ms, not_after_ms, then those of
--           the operation
--
-- Rules:
--
-- 1. Time is the server's: one clock for all gateways. A now_ms above 0 replaces it; tests alone send one. What a
--    clock does that is put back, or a server whose clock is behind after a failover, rule 4 of quota.py says.
-- 2. This script decides and charges. What a refusal means, and what windows show, quota.py works out from the
--    usage that is returned: the same numbers, so that there is one place for it.
-- 3. A call that is repeated changes nothing, and one that comes after not_after_ms, when its caller has given
--    up, does nothing: a stopped server finds such calls in its sockets when it goes on.
-- 4. Every number is whole and below 2^53, so a double holds it exactly.
-- 5. Nothing is written before everything is decided, so an error (out of memory, read-only) changes nothing.
--    An expired lease is taken away first, which is right whatever comes after it.
-- 6. Accounts and rows of reservations are no KEYS: they are not known before, and have the same hash tag.
-- 7. A reservation's subjects that have their seats are the first ones of its call's, in the same order.
-- 8. A meter whose limit the call lacks is left as it is (rule 6 of quota.py), and its account is kept as long as
--    that meter needs.
--
-- Returns   {now_ms, answer, then for each subject requests, tokens, live, spent, day, month}, see each
--           operation below.

local WEIGHT = 60000
local GRANT_SHARE = 4
local DAY_MS = 86400000
local KEPT_MS = 2 * DAY_MS -- longer than any request; an account that is empty by then is forgotten
local MONTH_KEPT_MS = 33 * DAY_MS
local EXPIRED_MAX = 512 -- leases that one call takes away; the next call goes on
local ROWS_MAX = 20000 -- as usage.py has it
local OTHERS = '*/*'
local PAGE = 500 -- rows, or keys, that one reply is made of, about
local SETTLED_MS = 10000 -- longer than a call that is sent again may take
local LAPSED_MAX = 10000 -- what lapses while there are so many has no billing line; it is counted all the same
local GIVEN_MAX = 100 -- lapsed ones that one call returns
local GIVEN_MS = 60000 -- how long a gateway has for their lines, before others are given them
local FIRST_NUMBER = 17 -- a position in the numbers
local FIRST_WORD = 5
local FIRST_LIMIT = 17 -- a position in the settings
local LIMITS = '>dddddd'
local LIMITS_LEN = 48
local ACCOUNT = '>ddddddddd'
local ACCOUNT_LEN = 72
local METERS_LEN = 56 -- without the times of the buckets
local ROW = '>dddddd'

local leases, reservations = KEYS[1], KEYS[2]
local beginning = string.sub(leases, 1, -string.len('leases') - 1) -- of the keys beside the leases
local operation, settings, reservation, numbers = unpack(ARGV, 1, 4)
local now, not_after = struct.unpack('>dd', numbers)
local ttl, days_kept = struct.unpack('>dd', settings)

if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
if not_after > 0 and now > not_after then
  return redis.error_reply('LATE the caller has given up')
end

local function day_of(ms)
  return math.floor(ms / DAY_MS)
end

-- periods.month_of: see there.
local function month_of(ms)
  local days = day_of(ms) + 719468
  local era = math.floor(days / 146097)
  local day = days - era * 146097
  local leap = math.floor(day / 1460) - math.floor(day / 36524) + math.floor(day / 146096)
  local year = math.floor((day - leap) / 365)
  day = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  return (era * 400 + year) * 12 + math.floor((5 * day + 2) / 153)
end

local function parse(value)
  local usage = {}
  if value then
    if #value < ACCOUNT_LEN then -- of a version that knew fewer meters, and one time for all
      local at = string.sub(value, 17, 24)
      value = value .. string.rep('\0', METERS_LEN - #value) .. at .. at
    end
  else
    value = string.rep('\0', ACCOUNT_LEN)
  end
  usage.requests, usage.tokens, usage.at, usage.live, usage.spent, usage.day, usage.month, usage.requests_at,
    usage.tokens_at = struct.unpack(ACCOUNT, value)
  return usage
end

local function show(usage)
  return struct.pack(
    ACCOUNT, usage.requests, usage.tokens, usage.at, usage.live, usage.spent, usage.day, usage.month,
    usage.requests_at, usage.tokens_at)
end

local function limit(number)
  return number >= 0 and number or nil
end

-- A bucket's level now, and the time that it is of.
local function drained_to(level, at, per_min)
  if level == 0 then
    return 0, now
  end
  if not per_min then
    return level, math.min(at, now)
  end
  return math.max(0, level - per_min * math.max(0, now - at)), now
end

-- The usage of the first `count` subjects as it is now, each with its limits; of all without a count.
local function holdings(count)
  local last, found = count and 2 + count or #KEYS, {}
  if last == 2 then
    return found
  end
  local values = redis.call('MGET', unpack(KEYS, 3, last))
  for i, value in ipairs(values) do
    local usage = parse(value)
    usage.key = KEYS[i + 2]
    local rpm, tpm, concurrent, budget, per_day, per_month =
      struct.unpack(LIMITS, settings, FIRST_LIMIT + LIMITS_LEN * (i - 1))
    usage.rpm, usage.tpm, usage.concurrent = limit(rpm), limit(tpm), limit(concurrent)
    usage.budget, usage.per_day, usage.per_month = limit(budget), limit(per_day), limit(per_month)
    usage.requests, usage.requests_at = drained_to(usage.requests, usage.requests_at, usage.rpm)
    usage.tokens, usage.tokens_at = drained_to(usage.tokens, usage.tokens_at, usage.tpm)
    if now > usage.at then
      if usage.day > 0 and day_of(usage.at) ~= day_of(now) then
        usage.day = 0
      end
      if usage.month > 0 and month_of(usage.at) ~= month_of(now) then
        usage.month = 0
      end
      usage.at = now
    end
    found[i] = usage
  end
  return found
end

-- The time until a bucket is empty. The call may lack the limit that says it: then a time that is enough for most.
local function empty_after(level, per_min)
  if level > 0 then
    return per_min and level / math.max(per_min, 1) or MONTH_KEPT_MS
  end
  return 0
end

local function save(usage)
  if usage.spent > 0 then
    redis.call('SET', usage.key, show(usage)) -- a budget is spent for good
    return
  end
  local empty_in = math.max(empty_after(usage.requests, usage.rpm), empty_after(usage.tokens, usage.tpm))
  if usage.month > 0 then
    empty_in = math.max(empty_in, MONTH_KEPT_MS)
  end
  redis.call('SET', usage.key, show(usage), 'PX', string.format('%.0f', KEPT_MS + math.ceil(empty_in)))
end

-- Adds six numbers to a row of a day.
local function count(usage_key, day, row, numbers)
  local key = string.format('%s%d', usage_key, day)
  local before = redis.call('HGET', key, row)
  if not before and redis.call('HLEN', key) >= ROWS_MAX then
    row = OTHERS
    before = redis.call('HGET', key, row)
  end
  if before then
    local sums = { struct.unpack(ROW, before) }
    for i, number in ipairs(numbers) do
      numbers[i] = sums[i] + number
    end
  end
  redis.call('HSET', key, row, struct.pack(ROW, unpack(numbers)))
  if not before then
    local left = (day + days_kept) * DAY_MS - now
    redis.call('PEXPIRE', key, string.format('%.0f', left))
  end
end

-- A reservation's record, taken apart: tokens, when they were reserved, USAGE, ROW, the accounts.
local function read(record)
  local tokens, at, usage_key, row, accounts = string.match(record, '^(%d+) (%d+) (%S+) (%S+)(.*)$')
  return tonumber(tokens), tonumber(at), usage_key, row, accounts
end

-- Keeps reservations that ran out until their billing lines are written.
local function keep_lapsed(lapsed)
  local key = beginning .. 'lapsed'
  for i = 1, math.min(#lapsed, LAPSED_MAX - redis.call('ZCARD', key)) do
    redis.call('ZADD', key, now, lapsed[i])
  end
  redis.call('PEXPIRE', key, KEPT_MS)
end

-- The words of a lapsed reservation: see the key.
local function lapsed_words(name, tokens, at, usage_key, row)
  return string.format('%s %.0f %.0f %s %s', name, tokens, at, usage_key, row)
end

-- Leases that ran out: their seats are free again, their tokens stay charged, and are counted as an estimate, until a
-- settlement comes after all.
local function expire()
  local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, EXPIRED_MAX)
  if #ended == 0 then
    return
  end
  local seats, lapsed = {}, {}
  for i, record in ipairs(redis.call('HMGET', reservations, unpack(ended))) do
    redis.call('ZREM', leases, ended[i])
    redis.call('HDEL', reservations, ended[i])
    local tokens, at, usage_key, row, accounts = read(record or '')
    for account in string.gmatch(accounts or '', '%S+') do
      seats[account] = (seats[account] or 0) + 1
    end
    if row and row ~= '-' then
      count(usage_key, day_of(at), row, { 1, 0, 0, 0, tokens > 0 and 1 or 0, tokens })
      lapsed[#lapsed + 1] = lapsed_words(ended[i], tokens, at, usage_key, row)
    end
    if row and (row ~= '-' or tokens > 0) then
      redis.call('SET', beginning .. 'late:' .. ended[i], record, 'PX', KEPT_MS)
    end
  end
  if #lapsed > 0 then
    keep_lapsed(lapsed)
  end
  for account, ended_seats in pairs(seats) do
    local value = redis.call('GET', account)
    if value then
      local usage = parse(value)
      usage.live = math.max(0, usage.live - ended_seats)
      redis.call('SET', account, show(usage), 'KEEPTTL')
    end
  end
end

local function fits(level, per_min, amount)
  return not per_min or level + amount * WEIGHT <= per_min * WEIGHT
end

local function has_left(spent, budget, tokens)
  return not budget or spent + tokens <= budget
end

-- `seated`: how many of the subjects, the first ones, have their seats already.
local function allowed(subjects, seated, tokens)
  for i, usage in ipairs(subjects) do
    if i > seated and not (fits(usage.requests, usage.rpm, 1)
        and (not usage.concurrent or usage.live < usage.concurrent)) then
      return false
    end
    if tokens > 0 and not (fits(usage.tokens, usage.tpm, tokens)
        and has_left(usage.spent, usage.budget, tokens)
        and has_left(usage.day, usage.per_day, tokens)
        and has_left(usage.month, usage.per_month, tokens)) then
      return false
    end
  end
  return true
end

local function grant(subjects, least, most, wanted)
  if least == most then
    return most
  end
  local left
  local function at_most(here)
    left = math.min(left or here, here)
  end
  for _, usage in ipairs(subjects) do
    if usage.tpm then
      at_most(math.floor(math.max(0, usage.tpm * WEIGHT - usage.tokens) / WEIGHT))
    end
    if usage.budget then
      at_most(math.max(0, usage.budget - usage.spent))
    end
    if usage.per_day then
      at_most(math.max(0, usage.per_day - usage.day))
    end
    if usage.per_month then
      at_most(math.max(0, usage.per_month - usage.month))
    end
  end
  if not left then
    return most
  end
  return math.min(most, math.max(least, math.min(wanted, left), math.floor(left / GRANT_SHARE)))
end

local function charge(subjects, seated, tokens)
  for i, usage in ipairs(subjects) do
    local seats = i > seated and 1 or 0
    usage.requests = usage.requests + (usage.rpm and seats * WEIGHT or 0)
    usage.tokens = usage.tokens + (usage.tpm and tokens * WEIGHT or 0)
    usage.live = usage.live + seats
    usage.spent = usage.spent + (usage.budget and tokens or 0)
    usage.day = usage.day + (usage.per_day and tokens or 0)
    usage.month = usage.month + (usage.per_month and tokens or 0)
    save(usage)
  end
end

local function book(tokens, usage_key, row, is_new)
  local record = { string.format('%.0f %.0f', tokens, now), usage_key, row, unpack(KEYS, 3) }
  redis.call('HSET', reservations, reservation, table.concat(record, ' '))
  if is_new then
    redis.call('ZADD', leases, now + ttl, reservation)
  end
end

local function answer(result, subjects)
  local reply = { now, result }
  for _, usage in ipairs(subjects) do
    reply[#reply + 1] = usage.requests
    reply[#reply + 1] = usage.tokens
    reply[#reply + 1] = usage.live
    reply[#reply + 1] = usage.spent
    reply[#reply + 1] = usage.day
    reply[#reply + 1] = usage.month
  end
  return reply
end

local function seats_of(accounts)
  local _, seats = string.gsub(accounts, '%S+', '')
  return seats
end

local operations = {}

-- The number: the least that the request will ask for, 0 or 1. Returns 0 when the seat is given, without the
-- usage; -1 when it is refused.
function operations.enter()
  expire()
  if redis.call('HEXISTS', reservations, reservation) == 1 then
    return { now, 0 }
  end
  local subjects, needs_tokens = holdings(), struct.unpack('>d', numbers, FIRST_NUMBER)
  if not allowed(subjects, 0, needs_tokens) then
    return answer(-1, subjects)
  end
  charge(subjects, 0, 0)
  book(0, '-', '-', true)
  return { now, 0 }
end

-- The numbers: the least, the most, what is wanted. The words: USAGE, ROW. Returns the tokens that are granted, and the usage
-- after that; when refused -1, less the number of subjects that have given their seats.
function operations.reserve()
  expire()
  local subjects, least, most, wanted = holdings(), struct.unpack('>ddd', numbers, FIRST_NUMBER)
  local record, seated = redis.call('HGET', reservations, reservation), 0
  if record then
    local reserved, _, _, _, accounts = read(record)
    if reserved > 0 then
      return answer(reserved, subjects)
    end
    seated = seats_of(accounts)
  end
  if not allowed(subjects, seated, least) then
    return answer(-1 - seated, subjects)
  end
  local granted = grant(subjects, least, most, wanted)
  charge(subjects, seated, granted)
  if not record then
    redis.call('DEL', beginning .. 'late:' .. reservation)
  end
  book(granted, ARGV[FIRST_WORD], ARGV[FIRST_WORD + 1], not record)
  return answer(granted, subjects)
end

-- The numbers: the tokens used; those of the prompt, cached ones, those of the answer. A negative prompt: it is
-- not to be counted. Returns the tokens that were reserved; -1 when there is no such reservation. A settlement
-- whose reply was lost is sent again: it changes nothing, and has the same answer. One that comes after its lease ran
-- out replaces the estimate.
function operations.settle()
  expire()
  local record, late = redis.call('HGET', reservations, reservation), false
  local trace = beginning .. 'settled:' .. reservation
  if not record then
    local before, at = string.match(redis.call('GET', trace) or '', '^(%d+) (%d+)$')
    if at and now - tonumber(at) < SETTLED_MS then
      return { now, tonumber(before) }
    end
    record, late = redis.call('GET', beginning .. 'late:' .. reservation), true
    if not record then
      return { now, -1 }
    end
  end
  local reserved, at, usage_key, row, accounts = read(record)
  local used, prompt, cached, completion = struct.unpack('>dddd', numbers, FIRST_NUMBER)
  local difference = used - reserved
  for _, usage in ipairs(holdings(seats_of(accounts))) do
    usage.live = math.max(0, usage.live - (late and 0 or 1))
    if usage.tpm then
      usage.tokens = math.max(0, usage.tokens + difference * WEIGHT)
    end
    if usage.budget then
      usage.spent = math.max(0, usage.spent + difference)
    end
    if usage.per_day and day_of(at) == day_of(usage.at) then
      usage.day = math.max(0, usage.day + difference)
    end
    if usage.per_month and month_of(at) == month_of(usage.at) then
      usage.month = math.max(0, usage.month + difference)
    end
    save(usage)
  end
  local counted = { 0, 0, 0, 0, 0, 0 }
  if prompt >= 0 then
    local estimated = used - prompt - completion
    counted = { 1, prompt, cached, completion, estimated > 0 and 1 or 0, estimated }
  end
  if late then
    counted[1], counted[6] = counted[1] - 1, counted[6] - reserved
    counted[5] = counted[5] - (reserved > 0 and 1 or 0)
    redis.call('ZREM', beginning .. 'lapsed', lapsed_words(reservation, reserved, at, usage_key, row))
    redis.call('DEL', beginning .. 'late:' .. reservation)
  end
  if row ~= '-' and (prompt >= 0 or late) then
    count(usage_key, day_of(at), row, counted)
  end
  redis.call('HDEL', reservations, reservation)
  redis.call('ZREM', leases, reservation)
  redis.call('SET', trace, string.format('%.0f %.0f', reserved, now), 'PX', SETTLED_MS)
  return { now, reserved }
end

-- The words: the reservations. Those that are gone are passed over.
function operations.renew()
  expire()
  for i = FIRST_WORD, #ARGV do
    redis.call('ZADD', leases, 'XX', now + ttl, ARGV[i])
  end
  redis.call('PEXPIRE', leases, KEPT_MS)
  redis.call('PEXPIRE', reservations, KEPT_MS)
  return { now, 0 }
end

-- The words: those of the lapsed ones whose billing lines are written, as they were given. Returns others, which
-- nobody else is given for a while.
function operations.lapsed()
  expire()
  local key = beginning .. 'lapsed'
  if ARGV[FIRST_WORD] then
    redis.call('ZREM', key, unpack(ARGV, FIRST_WORD))
  end
  local given = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, GIVEN_MAX)
  for _, one in ipairs(given) do
    redis.call('ZADD', key, now + GIVEN_MS, one)
  end
  return { now, 0, unpack(given) }
end

-- Writes nothing, so that a server that refuses writes still tells how things stand.
function operations.windows()
  return answer(0, holdings())
end

-- Adds rows that a gateway kept while there was no reservation here. KEYS: posted. The words: the number of
-- this post, which grows, USAGE, the day, and for each row its name and six numbers.
function operations.post()
  local number = tonumber(ARGV[FIRST_WORD])
  if number <= tonumber(redis.call('GET', KEYS[1]) or 0) then
    return { now, 0 }
  end
  for at = FIRST_WORD + 3, #ARGV, 7 do
    local numbers = {}
    for i = 1, 6 do
      numbers[i] = tonumber(ARGV[at + i])
    end
    count(ARGV[FIRST_WORD + 1], tonumber(ARGV[FIRST_WORD + 2]), ARGV[at], numbers)
  end
  redis.call('SET', KEYS[1], number, 'PX', MONTH_KEPT_MS)
  return { now, 1 }
end

-- For each key, the rows of a day, whether there are any.
function operations.days()
  local reply = { now, 0 }
  for _, key in ipairs(KEYS) do
    reply[#reply + 1] = redis.call('EXISTS', key)
  end
  return reply
end

-- The word: where to go on. Returns the same for the next call ('0' is the end), then for each row its name and
-- six numbers; some rows may come twice.
function operations.rows()
  local page = redis.call('HSCAN', KEYS[1], ARGV[FIRST_WORD], 'COUNT', PAGE)
  local reply = { now, page[1] }
  for i = 1, #page[2], 2 do
    reply[#reply + 1] = page[2][i]
    local sums = { struct.unpack(ROW, page[2][i + 1]) } -- and the position behind them
    for number = 1, 6 do
      reply[#reply + 1] = sums[number]
    end
  end
  return reply
end

-- KEYS: one that is on this server. The words: where to go on, PREFIX, the first day, the last one. Returns where
-- to go on, as rows does, then the tags of tenants that have rows on one of these days; some may come twice.
function operations.payers()
  local cursor, prefix, first, last = unpack(ARGV, FIRST_WORD, FIRST_WORD + 3)
  local page = redis.call('SCAN', cursor, 'MATCH', prefix .. ':{*}:usage:*', 'COUNT', PAGE)
  local reply, seen = { now, page[1] }, {}
  for _, key in ipairs(page[2]) do
    local tag, day = string.match(key, '{([^}]*)}:usage:(%d+)$')
    if tag and not seen[tag] and tonumber(day) >= tonumber(first) and tonumber(day) <= tonumber(last) then
      seen[tag] = true
      reply[#reply + 1] = tag
    end
  end
  return reply
end

-- Whether the server takes writes, at a key of its own.
function operations.probe()
  redis.call('SET', KEYS[1], now, 'PX', 60000)
  return { now, 0 }
end

return operations[operation]()
